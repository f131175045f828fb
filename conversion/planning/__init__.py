"""Every decision and refusal of a conversion, made before anything is written."""
