"""Values and pure decisions, of which all other rooms speak.

In: limits, usage, model names and terms of a request, as values.
Out: verdicts, prices, events, errors, and the texts of a halt.
May touch: its arguments, the price list of the package `genai-prices`, and `pydantic` for the
parts of a policy file.
"""
