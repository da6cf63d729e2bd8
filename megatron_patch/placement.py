"""The V placement in Megatron's terms: rank r of P holds stage r (chunk 0) and stage 2P-1-r (chunk 1).

So rank 0 has the first and the last stage: embedding and loss. Import this after `megatron_patch.apply()`.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from comm_core.runtime.errors import UsageError


def stage_of(rank: int, chunk: int, pp_size: int) -> int:
    """Stage that a rank holds in a chunk: `rank` in chunk 0, `2 * pp_size - 1 - rank` in chunk 1."""
    return rank if chunk == 0 else 2 * pp_size - 1 - rank


def embedding_ranks(pp_ranks: list[int], *unused: Any) -> list[int]:
    """For `initialize_model_parallel(get_embedding_ranks=...)`: embedding and head both live on pipeline rank 0.

    Megatron's default, first and last rank, would make it wait for an all-reduce that the last rank never joins.
    """
    return [pp_ranks[0]]


class VLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Distributes decoder layers evenly over the 2P stages of the V.

    Pass an instance as `pipeline_model_parallel_layout` of the transformer config, together with
    `virtual_pipeline_model_parallel_size=2`.

    Args:
        num_layers: decoder layers of the whole model; a multiple of 2 * pp_size.
        pp_size: pipeline-parallel ranks.

    Raises:
        UsageError: the layers do not fill the stages evenly.
    """

    layout: list[list[Any]]

    def __init__(self, num_layers: int, pp_size: int) -> None:
        stages = 2 * pp_size
        if num_layers < stages or num_layers % stages:
            raise UsageError(
                f"num_layers={num_layers} with the V placement on pp_size={pp_size}",
                allowed=f"a positive multiple of {stages} (two stages a rank)",
                fix="change num_layers or pp_size",
            )
        rows = [["decoder"] * (num_layers // stages) for _ in range(stages)]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, pp_size)
        # Megatron sorted the stages as chunk * P + rank; bring them into the order of the V.
        stock: list[list[Any]] = self.layout
        self._by_stage = [stock[stage % pp_size][stage // pp_size] for stage in range(stages)]
        self.layout = [[self._by_stage[stage_of(rank, chunk, pp_size)] for chunk in (0, 1)] for rank in range(pp_size)]

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of `layer_type` in all stages before the one that (pp_rank, vp_stage) holds."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        stage = stage_of(rank, vp_stage or 0, self.pipeline_model_parallel_size)
        return sum(row.count(layer_type) for row in self._by_stage[:stage])


def has_embedding(rank: int, chunk: int) -> bool:
    """True where GPTModel's `pre_process` must be set under the V."""
    return rank == 0 and chunk == 0


def has_loss(rank: int, chunk: int) -> bool:
    """True where GPTModel's `post_process` must be set under the V."""
    return rank == 0 and chunk == 1
