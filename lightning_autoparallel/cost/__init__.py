"""Predicted times; every quantity carries its unit in its name."""
