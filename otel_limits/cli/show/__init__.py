"""Ways to show an answer: on a terminal, as JSON or CSV, as a page."""
