"""Tasks: problems, environments, tools, data loading."""
