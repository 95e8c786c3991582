"""Every private torch API that dynaflow uses, each behind one small function.

A test fails on any use of a private API elsewhere. Seen to work on torch 2.11.0, 2.12.1 and 2.13.0 on CPU, and on
2.11.0+cu130 on CUDA, unless a docstring says otherwise.

`dynamo` reads what Dynamo captures, `dynamo_patches` works around its errors. `aot` compiles both passes of a graph
with AOTAutograd, `inductor` compiles one graph. `nodes` and `symbols` read fx nodes and symbolic numbers. `tensors`,
`fakes`,
`autograd`, `cuda`, `random` and `distributed` hold what their names say; `forks` repairs torch after a fork. `versions`
has the version of torch and shared types. `ops/` defines the operators `torch.ops.dynaflow.*`.
"""

from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dynaflow._torch import forks
from dynaflow._torch.aot import (
    bases_of_results,
    compile_passes,
    first_result,
    fresh_results,
    hold,
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
    have_scalers_step,
    in_forward_mode,
)
from dynaflow._torch.cuda import leave_pool, set_stream, sleep, timing_event
from dynaflow._torch.distributed import (
    exchange,
    meet_in,
    propagate_sharding,
    rank,
    ranks_of,
    shard_of,
    symmetric_memory,
)
from dynaflow._torch.dynamo import (
    GRAPH_INPUT,
    NEVER_FRAMES,
    annotate,
    break_where_cast,
    breaks,
    constant_in_trace,
    each_source_once,
    graph_input,
    hooks_of,
    is_marked_static,
    is_ours,
    is_part,
    is_restart,
    mark_dynamic,
    never_a_frame,
    pickled,
    restart_capture,
    serializable,
    traced_frame,
    unpickled,
    unwrapped_backend,
    waits_for_a_trace,
)
from dynaflow._torch.dynamo_patches import SHAPE_CHANGES, teach_dynamo
from dynaflow._torch.fakes import concrete_fake_mode, fake_again, is_fake, is_plain_fake, without_logs_of_fakes
from dynaflow._torch.inductor import (
    Kernels,
    compile_operator,
    inductor_settings,
    is_compilers,
    keep_sums_in_shape,
    no_cpp_compiler,
    reason,
    replaced,
    results_kept_apart,
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
    looked_at,
    looked_through,
    op_name,
    opaque_type_name,
    overload_of,
    packet_of,
    qualified_name,
    schema_of,
)
from dynaflow._torch.ops import draws, embedding_bag, offload, optimizer, out_variants, recurrent
from dynaflow._torch.random import draw_by_seed, draws_again, with_own_draws
from dynaflow._torch.symbols import Symbols, expression, hinted, number
from dynaflow._torch.tensors import (
    foreach_copy,
    foreach_zero,
    held_tensors,
    is_autograd_view,
    is_mutated,
    mark_static,
    own_parameters,
    same_addresses,
    storage_id,
    storage_users,
    view_at,
    wrapped_tensors,
)
from dynaflow._torch.versions import HOOKS, TORCH, Boxed, F, Hooks
