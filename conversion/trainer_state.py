"""What the trainer_state.json of Transformers' Trainer says of a training."""

from .reading import finite

STATE = "trainer_state.json"


def training_facts(state: dict) -> list[tuple[str, str]]:
    """Names and values for people, of what a trainer_state.json holds: steps, epochs, tokens, losses, seconds."""
    facts = []
    step, steps, epochs = (finite(state.get(name)) for name in ("global_step", "max_steps", "epoch"))
    if step is not None:
        facts.append(("steps", f"{step:,}" if not steps or steps == step else f"{step:,} of {steps:,}"))
    if epochs is not None:
        facts.append(("epochs", f"{epochs:.4g}"))
    if tokens := finite(state.get("num_input_tokens_seen")):
        facts.append(("tokens", f"{tokens:,}"))
    history = state.get("log_history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    for key, name in (("loss", "loss"), ("eval_loss", "held-out loss")):
        logged = [entry for entry in entries if finite(entry.get(key)) is not None]
        if logged:
            shown = [f"{entry[key]:.4f} at step {finite(entry.get('step'))}" for entry in (logged[0], logged[-1])]
            facts.append((name, shown[0] if len(logged) == 1 else ", then ".join(shown)))
    runtime = next((entry["train_runtime"] for entry in entries if finite(entry.get("train_runtime"))), None)
    if runtime is not None:
        facts.append(("time", f"{runtime:,.0f} s"))
    return facts
