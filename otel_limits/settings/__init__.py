"""User configuration: environment variables and the policy file."""
