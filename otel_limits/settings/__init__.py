"""What a user sets: variables of the environment, and the policy file."""
