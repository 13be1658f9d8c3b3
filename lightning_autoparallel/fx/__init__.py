"""Questions about graph nodes, asked in one place."""
