"""A push to the Hub: what is checked and planned before, and the push."""

from .push import PushResult, carry_out_push, plan_push, push_checkpoint

__all__ = ["PushResult", "carry_out_push", "plan_push", "push_checkpoint"]
