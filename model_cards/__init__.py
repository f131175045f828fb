"""The template of model cards, and two cards rendered from it."""
