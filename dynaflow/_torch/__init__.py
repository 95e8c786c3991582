"""Every private torch API that dynaflow uses, each in one small function.

A test fails on any use of a private API elsewhere. Seen to work on torch 2.11.0, 2.12.1 and 2.13.0 on CPU, and on
2.11.0+cu130 on CUDA, unless a docstring says otherwise.

`dynamo` reads what Dynamo captures, `dynamo_patches` works around its errors. `aot` compiles both passes of a graph
with AOTAutograd, `inductor` compiles one graph. `nodes` and `symbols` read fx nodes and symbolic numbers. `tensors`,
`fakes`, `autograd`, `cuda`, `random` and `distributed` hold what their names say; `forks` repairs torch after a fork.
`versions` has the version of torch and shared types. `ops/` defines the operators `torch.ops.dynaflow.*`.
"""

from torch._ops import OperatorBase, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dynaflow._torch import forks
from dynaflow._torch.aot import (
    bases_of_results,
    compile_passes,
    first_result,
    fresh_results,
    keep_alive,
    note_unused,
    results_of_gradients,
    returned_results,
    saved_results,
    traced_input,
    unused_results,
    written_inputs,
)
from dynaflow._torch.autograd import (
    after_backward,
    gets_gradient,
    has_gradient_hooks,
    in_forward_mode,
    support_grad_scaler,
)
from dynaflow._torch.cuda import end_failed_capture, set_stream, sleep, timing_event
from dynaflow._torch.distributed import (
    exchange_texts,
    propagate_sharding,
    rank,
    ranks_of,
    rendezvous,
    shard_of,
    symmetric_memory,
)
from dynaflow._torch.dynamo import (
    GRAPH_INPUT,
    INLINE_ONLY,
    annotate,
    break_if_autocast,
    cache_traced_sources,
    constant_in_trace,
    graph_break_reasons,
    graph_input,
    hooks_of,
    inline_only,
    is_dynaflow_backend,
    is_marked_static,
    is_partial_graph,
    is_restart,
    mark_dynamic,
    pickled,
    register_serializable,
    restart_capture,
    traced_frame,
    unpickled,
    unwrapped_backend,
    wait_for_other_trace,
)
from dynaflow._torch.dynamo_patches import SHAPE_CHANGES, patch_dynamo
from dynaflow._torch.fakes import concrete_fake_mode, is_fake, is_plain_fake, make_fake, silence_fake_errors
from dynaflow._torch.inductor import (
    Kernels,
    compile_operator,
    compiler_message,
    fix_reduced_shapes,
    inductor_settings,
    is_compiler_error,
    no_cpp_compiler,
    preserve_aliasing,
    replaced,
    warm_compiler,
)
from dynaflow._torch.nodes import (
    CHECKPOINTS,
    FLEX_ATTENTION,
    FLEX_ATTENTION_BACKWARD,
    LINEAR,
    REGIONS,
    SET_GRAD,
    SUBGRAPHS,
    boxed_forward,
    dtensor_method,
    has_transforms,
    is_torchs_own,
    is_view,
    name_complex_constants,
    op_name,
    opaque_type_name,
    overload_of,
    packet_of,
    qualified_name,
    schema_of,
    view_base,
    view_chain,
)
from dynaflow._torch.ops import draws, embedding_bag, offload, optimizer, out_variants, recurrent
from dynaflow._torch.random import draw_from_seeds, draws_from_seeds, with_compiled_draws
from dynaflow._torch.symbols import Symbols, expression, hint_of, number
from dynaflow._torch.tensors import (
    count_inner_tensors,
    foreach_copy,
    foreach_zero,
    inner_tensors,
    is_autograd_view,
    is_mutated,
    mark_static,
    own_parameters,
    same_addresses,
    storage_id,
    storage_use_count,
    view_at,
)
from dynaflow._torch.versions import HOOKS, TORCH, Boxed, F, Hooks
