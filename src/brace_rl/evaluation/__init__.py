"""Evaluation of a model folder on a task: records of every answer, and the field's figures over them."""
