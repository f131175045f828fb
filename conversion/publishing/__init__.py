"""A folder that is fit for pushing, the plan of a push, and the Hub's refusals."""
