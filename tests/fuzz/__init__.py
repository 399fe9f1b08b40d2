"""Garbage for every parser: whoever set a cap has it, or was refused with a sentence."""
