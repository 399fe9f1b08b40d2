"""The command line."""


def main() -> int:
    """Do nothing yet."""
    return 0
