"""Values and pure decisions: what all other rooms speak of."""
