"""Follows and halts Strands agents.

`framework` is what the rest of the product knows of it. `patches` sees invocations begin and end,
`attach` adds hooks (`legs`, `tools`) and stages (`stages`) to an agent, `calls` is the way out to a
provider, `halting` decides and acts, and `private` lists what is used of Strands by private names.
"""
