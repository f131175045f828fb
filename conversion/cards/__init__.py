"""The facts and the text of a model card."""
