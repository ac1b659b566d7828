"""What a CUDA graph consists of: the kinds of its nodes, and the names of its kernels."""

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from segcapture.backends.driver import call


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[tuple[str, str]]:
    """Kind and name of each node: `("kernel", "void at::native::...")`, `("memcpy", "")`, ...

    Empty where cuda-python is absent (ROCm), or where the graph was not kept.
    """
    try:
        from cuda.bindings import driver

        raw = driver.CUgraph(graph.raw_cuda_graph())
    except (ImportError, RuntimeError):
        return []
    return list(_nodes(driver, raw))


def _nodes(driver: Any, raw: Any) -> Iterator[tuple[str, str]]:
    count = call(driver, "cuGraphGetNodes", raw, 0)[-1]
    nodes = call(driver, "cuGraphGetNodes", raw, count)[0] if count else ()
    kinds = driver.CUgraphNodeType
    for node in nodes[:count]:
        kind = call(driver, "cuGraphNodeGetType", node)[0]
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield "kernel", _kernel_name(driver, node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _nodes(driver, call(driver, "cuGraphChildGraphNodeGetGraph", node)[0])
        else:
            yield str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower(), ""


def _kernel_name(driver: Any, node: Any) -> str:
    """A kernel of a library (`kern`) and one of a module (`func`) are asked in two ways."""
    (params,) = call(driver, "cuGraphKernelNodeGetParams", node)
    for handle, question in ((params.kern, "cuKernelGetName"), (params.func, "cuFuncGetName")):
        if handle is not None and int(handle):
            status, name = getattr(driver, question)(handle)
            if not status:
                return demangle(name.decode() if isinstance(name, bytes) else str(name))
    return "?"


@functools.lru_cache(maxsize=4096)
def demangle(name: str) -> str:
    """A C++ name as it is written, by the C++ runtime that torch has loaded; others as they are."""
    function = _demangler()
    if function is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


@functools.cache
def _demangler() -> Any:
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    return function
