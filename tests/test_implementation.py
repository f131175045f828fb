"""What computes connections: as asked for, or what runs."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hyperconn import set_hc_implementation
from hf_hyperconn.models import hyper_connections_step as step

from .conftest import hc_llama


@pytest.fixture(autouse=True)
def auto_implementation() -> Iterator[None]:
    yield
    set_hc_implementation("auto")


class TestChoice:
    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="accepted are 'auto', 'torch', 'triton'"):
            set_hc_implementation("cuda")

    def test_triton_never_falls_back(self, monkeypatch):
        monkeypatch.setattr(step, "_TRITON_INTERPRETS", False)
        set_hc_implementation("triton")
        with pytest.raises(RuntimeError, match="the streams are on cpu, not on a GPU"):
            hc_llama()(torch.arange(3)[None])

    def test_triton_that_is_not_installed_is_refused(self, monkeypatch):
        monkeypatch.setattr(step, "_TRITON_IS_INSTALLED", False)
        with pytest.raises(RuntimeError, match="pip install triton"):
            set_hc_implementation("triton")

    def test_auto_says_once_what_it_took(self, monkeypatch):
        monkeypatch.setattr(step, "_logged", set())
        messages = []
        monkeypatch.setattr(step.logger, "info", messages.append)
        model = hc_llama()
        for _ in range(2):
            model(torch.arange(3)[None])
        assert messages == ["hyper-connections are computed by torch, because the streams are on cpu, not on a GPU."]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
class TestWhereKernelsFail:
    """Triton is installed here, and finds no driver."""

    @pytest.fixture(autouse=True)
    def tried_anew(self, monkeypatch) -> None:
        monkeypatch.setattr(step, "_failures", {})
        monkeypatch.setattr(step, "_TRITON_IS_INSTALLED", True)
        monkeypatch.setattr(step, "_logged", set())

    @pytest.fixture
    def streams(self) -> torch.Tensor:
        """As if there were a GPU."""
        with FakeTensorMode():
            return torch.empty(1, 3, 4, 24, device="cuda:0")

    def test_auto_goes_on_with_torch_and_says_why(self, streams, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("hf_hyperconn"), "propagate", True)
        for _ in range(2):
            assert step.implementation(streams) == "torch"
        assert caplog.text.count("a kernel failed on cuda:0") == 1

    def test_a_reason_is_told_after_another(self, streams, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("hf_hyperconn"), "propagate", True)
        assert step.implementation(torch.empty(1, 3, 4, 24)) == "torch"
        assert step.implementation(streams) == "torch"
        assert caplog.text.count("a kernel failed on cuda:0") == 1

    def test_what_failed_is_tried_again(self, streams, monkeypatch):
        results = iter(["it was busy", None])
        monkeypatch.setattr(step, "_try_kernels", lambda device: next(results))
        assert [step.implementation(streams) for _ in range(3)] == ["torch", "triton", "triton"]

    def test_what_never_runs_is_tried_three_times_and_when_it_is_asked_for(self, streams, monkeypatch):
        tried = []
        monkeypatch.setattr(step, "_try_kernels", lambda device: tried.append(device) or "it is old")
        assert {step.implementation(streams) for _ in range(9)} == {"torch"}
        assert len(tried) == 3
        set_hc_implementation("auto")
        assert step.implementation(streams) == "torch"
        assert len(tried) == 4

    def test_nothing_is_tried_while_a_graph_is_captured(self, streams, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert step.implementation(streams) == "triton"
        assert step._failures == {}

    def test_asked_for_they_raise(self, streams):
        set_hc_implementation("triton")
        with pytest.raises(RuntimeError, match="a kernel failed on cuda:0"):
            step.implementation(streams)

    def test_a_compiler_is_told(self):
        function = torch.compile(lambda x: x + (step._why_kernels_fail(torch.device("cpu")) is None), backend="eager")
        assert torch.equal(function(torch.ones(1)), torch.ones(1))
