"""What vendors mean by their usage, and what stands in its place where they tell none."""
