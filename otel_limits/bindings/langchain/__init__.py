"""LangChain and LangGraph agents, tracked through the public methods of their classes.

LangChain is not imported before the application imports it.
"""
