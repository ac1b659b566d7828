"""What a CUDA graph consists of: the kinds of its nodes, and the names of its kernels."""

from collections.abc import Iterator
from typing import Any

import torch

from segcapture.backends.cuda.driver import call


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


def demangle(name: str) -> str:
    """A C++ name as it is written, by the C++ runtime of torch; others as they are."""
    from_torch: Any = torch._C
    return str(from_torch._demangle(name)) if name.startswith("_Z") else name
