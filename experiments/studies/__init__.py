"""Measurements of single parts of the project; each script says in its first lines what it measures."""
