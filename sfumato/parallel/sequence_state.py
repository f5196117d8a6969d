"""What the attention modules of a model whose sequences are cut over ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.parallel.attention import SequenceGroups
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, find_blocks
from sfumato.parallel.row_attention import OFF


class SequenceState:
    """State that the attention modules of one model share."""

    seam: str
    """How attention must be called so that it can be replaced, for messages."""

    def __init__(self, module: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
        self.module = module
        self.mesh = mesh
        self.plan = plan
        self.name = type(module).__name__
        self.groups = SequenceGroups.from_mesh(mesh)
        self.group = mesh.group("cp")
        self.blocks = find_blocks(module, plan)
        self.called: set[nn.Module] = set()
        """Attention modules that have used the distributed attention."""
        self.checked = False
        """Whether the first forward pass has shown that every block used it."""

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceState:
        raise ConfigError(f"{self.name} cannot be copied after it has been made sequence parallel: copy it before")

    def check(self) -> None:
        """After the first forward pass: raises ConfigError when a block did not call the distributed attention."""
        missing = [name for name, block in self.blocks.items() if self.called.isdisjoint(block.modules())]
        if missing:
            raise ConfigError(
                f"{self.name}: {', '.join(missing[:3])} ran without the distributed attention, so its tokens saw only "
                f"those of their own rank. Sequence parallelism needs attention that {self.seam}: {OFF}"
            )
        self.checked = True

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensor, of one shape, of every rank that shares the sequence."""
        gathered = [torch.empty_like(values) for _ in range(self.groups.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return gathered

    def gather_lengths(self, *lengths: int) -> list[tuple[int, ...]]:
        """The lengths of every rank, in rank order."""
        gathered = self.gather(torch.tensor(lengths, device=self.mesh.device))
        return [tuple(rank_lengths.tolist()) for rank_lengths in gathered]
