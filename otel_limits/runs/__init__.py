"""Live invocations: what each has used, and how it is going to end."""
