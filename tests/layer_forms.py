"""Layers of the form that hyper-connections replace, and of forms that they can't, each once."""

import torch
from torch import nn


class Layer(nn.Module):
    """The form, once more: what the next layers change."""

    def forward(self, hidden_states, scale=2.0):
        residual = hidden_states
        half = hidden_states / 2
        hidden_states = residual + half * scale
        residual = hidden_states
        hidden_states = hidden_states**2
        hidden_states = residual + hidden_states
        return hidden_states


class UsesAnArgumentTwice(nn.Module):
    def forward(self, hidden_states, scale=2.0):
        hidden_states = hidden_states + hidden_states * scale
        hidden_states = hidden_states + hidden_states * scale
        return hidden_states


class ReadsTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states * 3
        hidden_states = residual + hidden_states.view(residual.shape)
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class AddsTheStreamLast(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states / 3
        hidden_states = hidden_states + residual
        hidden_states = hidden_states + torch.tanh(hidden_states)
        return hidden_states


class HasOtherNames(nn.Module):
    def forward(self, activations):
        raw = activations
        normed = activations / 3
        residual = normed + raw
        hidden_states = residual**2
        hidden_states = hidden_states + residual
        return hidden_states


class AddsOnce(nn.Module):
    def forward(self, x, **kwargs):
        halves = x / 2
        attention = torch.tanh(halves)
        x = attention + halves**2 + x
        return x


class AddsThreeTimes(nn.Module):
    def forward(self, x):
        x = x + x / 3
        for power in (2, 3):
            last = x**power
        x = x + last
        y = x + torch.tanh(x)
        return y


class WidensTheStream(nn.Module):
    widens = True

    def forward(self, hidden_states):
        residual = hidden_states
        if self.widens:
            residual = residual.to(torch.float32)
        hidden_states = hidden_states.to(torch.bfloat16) / 3
        hidden_states = residual + hidden_states
        return hidden_states


class CarriesOverWhatItMayMakeAnew(nn.Module):
    def forward(self, hidden_states, anew=False):
        half = hidden_states / 2
        hidden_states = hidden_states + half
        if anew:
            half = hidden_states / 2
        hidden_states = hidden_states + half
        return hidden_states


class CarriesOverUnderTheStreamsName(nn.Module):
    def forward(self, hidden_states):
        half = hidden_states / 2
        hidden_states = hidden_states + half
        third = half / 3
        half = hidden_states
        hidden_states = hidden_states + third
        return hidden_states


class CarriesOverWhatItMayMake(nn.Module):
    def forward(self, hidden_states, halves=True):
        if halves:
            half = hidden_states / 2
        hidden_states = hidden_states + hidden_states**2
        hidden_states = hidden_states + half * hidden_states
        return hidden_states


class HandsOn(nn.Module):
    """As an adaptive norm does, whose gates later branches use."""

    def forward(self, hidden_states, scale=2.0):
        gate, *gates = torch.tanh(scale * torch.arange(3)).to(hidden_states.dtype)
        hidden_states = gate * hidden_states / 2 + hidden_states
        hidden_states = hidden_states + gates[0] * hidden_states**2
        hidden_states = hidden_states + gates[1] * torch.tanh(hidden_states)
        return hidden_states


class MayMakeAnewBetween(nn.Module):
    def forward(self, x, anew=False):
        half = x / 2
        x = x + half
        if anew:
            half = x / 3
        x = x + x**2
        x = x + half * torch.tanh(x)
        return x


class HasTwoStreams(nn.Module):
    def forward(self, hidden_states, encoded):
        both = torch.tanh(hidden_states + encoded)
        hidden_states = hidden_states + both
        encoded = encoded + both
        return encoded, hidden_states


class ChangesAnArgument(nn.Module):
    def forward(self, hidden_states, scale=2.0):
        scale = scale / 2
        hidden_states = hidden_states + hidden_states * scale
        hidden_states = hidden_states + hidden_states * scale
        return hidden_states


class ReadsTheStreamOfBefore(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + hidden_states / 2
        hidden_states = hidden_states + residual
        return hidden_states


class ScalesTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states / 2
        hidden_states = residual * 2 + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class NormsTheResidual(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states / 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ChangesTheSum(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + hidden_states
        hidden_states = hidden_states * 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ChangesTheLastSum(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states + hidden_states / 2
        hidden_states = hidden_states.clamp(-1, 1)
        return hidden_states


class ChangesTheStreamInPlace(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states.mul_(2)
        hidden_states = residual + hidden_states / 2
        return hidden_states


class AddsInPlace(nn.Module):
    def forward(self, hidden_states):
        hidden_states += hidden_states / 2
        return hidden_states


class AddsUnderACondition(nn.Module):
    def forward(self, hidden_states, parallel=False):
        half = hidden_states / 2
        if parallel:
            hidden_states = hidden_states + half
        return hidden_states


class ReturnsWhatItAdds(nn.Module):
    def forward(self, hidden_states):
        weights = hidden_states / 2
        hidden_states = hidden_states + weights
        return hidden_states, weights


class ReturnsMore(nn.Module):
    def forward(self, hidden_states):
        weights = hidden_states / 2
        hidden_states = hidden_states + weights
        return hidden_states, self.training


class AddsWhatItIsGiven(nn.Module):
    def forward(self, hidden_states, encoded=None, scale=None):
        if encoded is not None:
            hidden_states = hidden_states + encoded
        half = hidden_states / 2
        if scale is not None:
            half = half * (scale + 1)
        hidden_states = hidden_states + half
        return hidden_states


class AddsWhatItMakesItself(nn.Module):
    def forward(self, hidden_states, encoded=None):
        if encoded is None:
            encoded = hidden_states / 2
        if encoded is not None:
            hidden_states = hidden_states + encoded
        return hidden_states


class ReturnsEarly(nn.Module):
    def forward(self, hidden_states, skip=False):
        if skip:
            return hidden_states
        hidden_states = hidden_states + hidden_states / 2
        return hidden_states
