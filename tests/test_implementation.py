"""What computes connections: as asked for, or what runs."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hyperconn import set_hc_implementation
from hf_hyperconn.models import computing
from hf_hyperconn.models.hc_step import _run_one

from .conftest import hc_llama


@pytest.fixture(autouse=True)
def auto_implementation() -> Iterator[None]:
    yield
    set_hc_implementation("auto")


class TestChoice:
    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="must be one of 'auto', 'torch', 'triton' .got 'cuda'"):
            set_hc_implementation("cuda")

    def test_triton_never_falls_back(self, monkeypatch):
        monkeypatch.setattr(computing, "_TRITON_INTERPRETS", False)
        set_hc_implementation("triton")
        with pytest.raises(RuntimeError, match="the streams are on cpu, not on a GPU"):
            hc_llama()(torch.arange(3)[None])

    def test_triton_that_is_not_installed_is_refused(self, monkeypatch):
        monkeypatch.setattr(computing, "_TRITON_IS_INSTALLED", False)
        with pytest.raises(RuntimeError, match="pip install triton"):
            set_hc_implementation("triton")

    def test_auto_says_once_what_it_took(self, monkeypatch):
        monkeypatch.setattr(computing, "_logged", set())
        messages = []
        monkeypatch.setattr(computing.logger, "info", messages.append)
        model = hc_llama()
        for _ in range(2):
            model(torch.arange(3)[None])
        assert messages == ["hyper-connections are computed by torch, because the streams are on cpu, not on a GPU."]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
class TestWhereKernelsFail:
    """Triton is installed here, and finds no driver."""

    @pytest.fixture(autouse=True)
    def tried_anew(self, monkeypatch) -> None:
        monkeypatch.setattr(computing, "_failures", {})
        monkeypatch.setattr(computing, "_TRITON_IS_INSTALLED", True)
        monkeypatch.setattr(computing, "_logged", set())

    @pytest.fixture
    def streams(self) -> torch.Tensor:
        """As if there were a GPU."""
        with FakeTensorMode():
            return torch.empty(1, 3, 4, 24, device="cuda:0")

    def test_auto_goes_on_with_torch_and_says_why(self, streams, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("hf_hyperconn"), "propagate", True)
        for _ in range(2):
            assert computing.chosen_implementation(streams, _run_one) == "torch"
        assert caplog.text.count("a kernel failed on cuda:0") == 1

    def test_a_reason_is_told_after_another(self, streams, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("hf_hyperconn"), "propagate", True)
        assert computing.chosen_implementation(torch.empty(1, 3, 4, 24), _run_one) == "torch"
        assert computing.chosen_implementation(streams, _run_one) == "torch"
        assert caplog.text.count("a kernel failed on cuda:0") == 1

    def test_what_failed_is_tried_again(self, streams, monkeypatch):
        results = iter(["it was busy", None])
        monkeypatch.setattr(computing, "_try_kernels", lambda *_: next(results))
        assert [computing.chosen_implementation(streams, _run_one) for _ in range(3)] == ["torch", "triton", "triton"]

    def test_what_never_runs_is_tried_three_times_and_when_it_is_asked_for(self, streams, monkeypatch):
        tried = []
        monkeypatch.setattr(computing, "_try_kernels", lambda device, _: tried.append(device) or "it is old")
        assert {computing.chosen_implementation(streams, _run_one) for _ in range(9)} == {"torch"}
        assert len(tried) == 3
        set_hc_implementation("auto")
        assert computing.chosen_implementation(streams, _run_one) == "torch"
        assert len(tried) == 4

    def test_nothing_is_tried_while_a_graph_is_captured(self, streams, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert computing.chosen_implementation(streams, _run_one) == "triton"
        assert computing._failures == {}

    def test_asked_for_they_raise(self, streams):
        set_hc_implementation("triton")
        with pytest.raises(RuntimeError, match="a kernel failed on cuda:0"):
            computing.chosen_implementation(streams, _run_one)

    def test_a_compiler_is_told(self):
        function = torch.compile(
            lambda x: x + (computing._why_kernels_fail(torch.device("cpu"), _run_one) is None), backend="eager"
        )
        assert torch.equal(function(torch.ones(1)), torch.ones(1))
