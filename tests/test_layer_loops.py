"""How a model passes the stream from layer to layer, read from its forward."""

import ast

import pytest
import torch
from torch import nn

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.reading import loops
from hf_hyperconn.families.reading.loops import read_layer_loop
from hf_hyperconn.in_memory.running_code import running_code


class SkipsLayers(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            if self.training:
                continue
            hidden_states = layer(hidden_states)
        return hidden_states


class AddsBetweenLayers(nn.Module):
    def forward(self, hidden_states, extra):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
            hidden_states = hidden_states + extra
        return hidden_states


class KeepsTheStream(nn.Module):
    def forward(self, hidden_states):
        kept = []
        for layer in self.layers:
            hidden_states = layer(hidden_states, kept=kept + [hidden_states])
        return hidden_states


class UsesWhatLayersReturn(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            outputs = layer(hidden_states)
            hidden_states = outputs[0] + outputs[1]
        return hidden_states


class PassesOn(nn.Module):
    def forward(self, hidden_states, output_hidden_states=False):
        all_hidden_states = ()
        for layer in self.blocks:
            if output_hidden_states:
                all_hidden_states = all_hidden_states + (hidden_states,)
            outputs = layer(hidden_states, 1, scale=2)
            hidden_states = outputs[0]
        return hidden_states


class Checkpoints(nn.Module):
    """As models of diffusers do."""

    def forward(self, hidden_states, scale=2):
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, None, scale)
            else:
                hidden_states = block(hidden_states, mask=None, scale=scale)
        return hidden_states


class CheckpointsAnother(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            if self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(layer, hidden_states * 2)
            else:
                hidden_states = layer(hidden_states)
        return hidden_states


class PassesIndicesOn(nn.Module):
    def forward(self, hidden_states):
        indices = None
        for layer in self.layers:
            hidden_states, indices = layer(hidden_states, indices=indices)
        return hidden_states


class PassesAnotherName(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            outputs = layer(hidden_states)
            hidden_states = outputs
        return hidden_states


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (PassesOn, "blocks", (1, True)),
        (Checkpoints, "blocks", (2, False)),
        (PassesIndicesOn, "layers", (0, True)),
        (PassesAnotherName, "layers", (0, False)),
    ],
)
def test_loops_over_layers(model, layers, expected):
    loop = read_layer_loop(running_code(model).definition, model.__name__, layers)
    assert (loop.positional, loop.takes_first) == expected


@pytest.mark.parametrize(
    "model", [SkipsLayers, AddsBetweenLayers, KeepsTheStream, UsesWhatLayersReturn, CheckpointsAnother]
)
def test_a_base_model_that_uses_the_stream_between_layers_is_refused(model):
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {model.__name__} does more"):
        read_layer_loop(running_code(model).definition, model.__name__)


@pytest.mark.parametrize(
    ("statement", "only_chooses"),
    [
        ("stream = stream[:, chosen, :]", True),
        ("stream = stream[:, chosen, :] * 2", False),
        ("stream += 1", False),
        ("stream[0] = 0", False),
        ("stream, chosen = chosen, stream", False),
    ],
)
def test_a_method_between_layers_may_only_choose_tokens(statement, only_chooses):
    method = ast.parse(f"def method(self, stream, chosen):\n    {statement}\n    return stream, chosen").body[0]
    assert loops._slices_first(method) == only_chooses
