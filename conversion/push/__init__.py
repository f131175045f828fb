"""A push to the Hub: its checks, its plan, and its commit."""

from .push import PushResult, carry_out_push, plan_push, push_checkpoint

__all__ = ["PushResult", "carry_out_push", "plan_push", "push_checkpoint"]
