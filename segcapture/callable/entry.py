"""One signature of a `GraphedCallable`: its warm-up, its capture, its replays."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from segcapture.callable.bucket import Bucket
from segcapture.callable.calls import Call
from segcapture.callable.inputs import StaticInputs
from segcapture.callable.outputs import Outputs, check_no_grad
from segcapture.callable.places import contents
from segcapture.callable.statistics import SignatureStats
from segcapture.callable.trees import copy_tree
from segcapture.callable.unchanged import Before
from segcapture.callable.weights import Weights
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import CaptureFailedError
from segcapture.writeback.structure import tensors_in

Check = Callable[[], None]


class Entry:
    """What is kept for one signature."""

    def __init__(
        self,
        name: str,
        places: Mapping[str, Mapping[str, str]],
        why: Callable[[], str],
        capture: BreakableCUDAGraphCapture,
        bucket: Bucket | None,
    ) -> None:
        self.name = name
        self.places = places
        self._why = why
        self.calls = 0
        self.warmups = 0
        self.failure: BaseException | None = None
        """Why it runs eagerly from now on."""
        self.weights: Weights | None = None
        self.capture = capture
        self._bucket = bucket
        self._inputs: StaticInputs | None = None
        self._outputs: Outputs | None = None

    @property
    def why(self) -> str:
        """What differed from the nearest signature when it first came: put into words when asked."""
        return self._why()

    @property
    def captured(self) -> bool:
        """Whether calls are replayed."""
        return self._outputs is not None

    def warm_up(
        self, fn: Callable[..., Any], call: Call, check: Check
    ) -> tuple[Any, CaptureFailedError | None]:
        """Run the function eagerly where the capture will; also what would make the capture fail."""
        self.warmups += 1
        problem = None
        with self.capture.warm_up():
            if call.padded:
                out = self._run_padded(fn, call, check)
            else:
                before = Before(call.args, call.kwargs, call.tensors)
                out = fn(*call.args, **call.kwargs)
                try:
                    before.check()
                    check()
                    check_no_grad(out, call.grad)
                except CaptureFailedError as error:
                    problem = error
        for tensor in tensors_in(out):
            if tensor.device.type != "cpu":  # made on the capture stream, and used on this one
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return out, problem

    def _run_padded(self, fn: Callable[..., Any], call: Call, check: Check) -> Any:
        inputs = StaticInputs(call)
        args, kwargs = _with(inputs, call)
        before = Before(args, kwargs, inputs.tensors)
        out = fn(*args, **kwargs)
        before.check()
        check()
        inputs.find_mutated(call.tensors)
        inputs.copy_back(call.tensors)
        return self._outputs_of(out, inputs, call, args, kwargs, clone=False).collect(
            call.tensors, call.length
        )

    def capture_call(self, fn: Callable[..., Any], call: Call, clone: bool, check: Check) -> Any:
        """Capture the function while it serves a call. `check` is called after it.

        Raises:
            CaptureFailedError: it changed a container or object among its arguments, or returned a tensor
                that requires grad; and all that a capture raises. It can be tried again.
        """
        capture = self.capture
        capture.reset()
        with capture.turn():
            inputs = StaticInputs(call)
            args, kwargs = _with(inputs, call)
            before = Before(args, kwargs, inputs.tensors)
            try:
                with capture:
                    out = fn(*args, **kwargs)
                before.check()
                check()
                check_no_grad(out, call.grad)
                inputs.find_mutated(call.tensors)
                outputs = self._outputs_of(out, inputs, call, args, kwargs, clone)
            except BaseException:
                capture.reset()
                raise
            inputs.copy_back(call.tensors)
            inputs.watched = capture.num_eager_breaks > 0
            self._inputs, self._outputs = inputs, outputs
            return outputs.collect(call.tensors, call.length)

    def _outputs_of(
        self, out: Any, inputs: StaticInputs, call: Call, args: Any, kwargs: Any, clone: bool
    ) -> Outputs:
        cut = {}
        if self._bucket is not None and call.padded:
            size = next(iter(call.padded.values()))[1]
            cut = self._bucket.out_dims(out, size)
        arguments = {id(value) for value in contents([("args", args), ("kwargs", kwargs)]).values()}
        return Outputs(out, inputs, cut, arguments, self.capture, clone)

    def replay(self, call: Call) -> Any:
        """Serve a call by replaying."""
        inputs, outputs = self._inputs, self._outputs
        assert inputs is not None
        assert outputs is not None
        with self.capture.turn():
            if inputs.on_host and call.device.type != "cpu":  # the last replay may still read them
                torch.accelerator.current_stream(call.device).synchronize()
            outputs.check_not_lent(call.tensors, inputs.mutated)
            inputs.fill(call.tensors, call.storages)
            try:
                self.capture.replay()
            except BaseException as error:
                try:
                    inputs.copy_back(call.tensors)  # as far as it came
                except Exception as trouble:
                    error.add_note(f"segcapture: and then, copying back: {trouble}")
                raise
            if inputs.watched and (new := inputs.find_newly_mutated()):
                outputs.check_not_lent(call.tensors, new)
            inputs.copy_back(call.tensors)
            if not outputs.is_current():
                arguments = _with(inputs, call)
                outputs = self._outputs_of(outputs.out, inputs, call, *arguments, outputs.clone)
                self._outputs = outputs
            return outputs.collect(call.tensors, call.length)

    def static_arguments(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with the static inputs as its tensors."""
        assert self._inputs is not None
        return _with(self._inputs, call)

    def release(self) -> None:
        """Free the capture, its inputs and outputs, after the work that uses them."""
        if self._inputs is None:
            return
        with self.capture.turn():
            for tensor in self._inputs.tensors:
                if tensor.device.type != "cpu":
                    tensor.record_stream(torch.accelerator.current_stream(tensor.device))
            self._inputs = self._outputs = None
            self.capture.reset()

    def stats(self) -> SignatureStats:
        """For people."""
        state = "captured" if self.captured else f"warming up ({self.warmups})"
        if self.failure is not None:
            state = f"eager: {type(self.failure).__name__}: {self.failure}"
        nbytes = 0
        if self._inputs is not None and self._outputs is not None:
            nbytes = self._inputs.nbytes + self._outputs.nbytes
        return SignatureStats(
            name=self.name,
            arguments=_summary(self.places),
            state=state,
            calls=self.calls,
            nbytes=nbytes,
            why=self.why,
        )


def _with(inputs: StaticInputs, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    static = {id(tensor): inputs.tensors[i] for i, tensor in reversed(list(enumerate(call.tensors)))}
    made: tuple[tuple[Any, ...], dict[str, Any]] = copy_tree(
        (call.args, call.kwargs), lambda tensor: static[id(tensor)]
    )
    return made


def _summary(places: Mapping[str, Mapping[str, str]]) -> str:
    parts = []
    for path, words in places.items():
        if "shape" in words:
            parts.append(f"{path} {words['dtype']} {words['shape']}")
        elif "value" in words:
            parts.append(f"{path}={words['value']}")
    return ", ".join(parts) or "no arguments"
