"""Operations of encoders of audio on a spectrogram of so many frames."""

from __future__ import annotations

from torch import nn


def sound_flops(tower: nn.Module, beside: dict[str, nn.Module]) -> SoundFlops | PlaneSoundFlops | WholeSoundFlops:
    """The count of a model's encoder of audio.

    Args:
        tower: the encoder.
        beside: the other parts beside the language model; a projector of this encoder is taken out.
    """
    if not hasattr(tower, "conv1"):
        return PlaneSoundFlops(tower)
    return SoundFlops(tower) if hasattr(tower, "proj") else WholeSoundFlops(tower, beside.pop("multi_modal_projector"))


class SoundFlops:
    """Operations of the audio encoder of omni models on a spectrogram.

    Two convolutions, the second of which halves the frames; blocks in which frames of a window see each other; and a
    projection of each pair of them. What fills the last window up is not counted.
    """

    def __init__(self, tower: nn.Module) -> None:
        """Args are the module."""
        self.first, self.second, self.projection = (
            layer.weight.numel() for layer in (tower.conv1, tower.conv2, tower.proj)
        )
        self.blocks = sum(weight.numel() for weight in tower.layers.parameters() if weight.ndim == 2)
        self.attention = 4 * tower.config.d_model * len(tower.layers)
        self.window = 2 * tower.config.n_window
        self.is_trained = any(weight.requires_grad for weight in tower.parameters())

    def forward(self, frames: int) -> int:
        """Operations of a forward pass over so many frames."""
        sizes = [self.window] * (frames // self.window) + [frames % self.window] * (frames % self.window > 0)
        halves = [(size + 1) // 2 for size in sizes]
        matrices = self.first * frames + (self.second + self.blocks) * sum(halves)
        pairs = sum(half**2 for half in halves)
        return 2 * (matrices + self.projection * (sum(halves) // 2)) + self.attention * pairs

    def training(self, frames: int) -> int:
        """Operations of a forward and a backward pass; of an encoder of which parts are frozen, as if none were."""
        return self.forward(frames) * (3 if self.is_trained else 1)


class PlaneSoundFlops:
    """Likewise, of Qwen3-Omni: three convolutions halve frames and bands of each chunk of a second."""

    def __init__(self, tower: nn.Module) -> None:
        """Args are the module."""
        self.convolutions = [layer.weight.numel() for layer in (tower.conv2d1, tower.conv2d2, tower.conv2d3)]
        self.bands, self.chunk = tower.num_mel_bins, 2 * tower.n_window
        matrices = [tower.conv_out.weight, tower.proj1.weight, tower.proj2.weight, *tower.layers.parameters()]
        self.of_token = sum(weight.numel() for weight in matrices if weight.ndim == 2)
        self.attention = 4 * tower.config.d_model * len(tower.layers)
        self.chunks_of_window = tower.n_window_infer // self.chunk
        self.is_trained = any(weight.requires_grad for weight in tower.parameters())

    def forward(self, frames: int) -> int:
        """Operations of a forward pass over so many frames."""
        sizes = [self.chunk] * (frames // self.chunk) + [frames % self.chunk] * (frames % self.chunk > 0)
        total, tokens = 0, []
        for size in sizes:
            bands = self.bands
            for weights in self.convolutions:
                size, bands = (size + 1) // 2, (bands + 1) // 2
                total += weights * size * bands
            tokens.append(size)
        total += self.of_token * sum(tokens)
        windows = [tokens[at : at + self.chunks_of_window] for at in range(0, len(tokens), self.chunks_of_window)]
        return 2 * total + self.attention * sum(sum(window) ** 2 for window in windows)

    def training(self, frames: int) -> int:
        """As ``SoundFlops``."""
        return self.forward(frames) * (3 if self.is_trained else 1)


class WholeSoundFlops:
    """Likewise, of Qwen2-Audio, which fills every spectrogram up to the longest one, and computes what fills it up."""

    def __init__(self, tower: nn.Module, projector: nn.Module) -> None:
        """Args are the modules."""
        halves = tower.config.max_source_positions
        blocks = sum(weight.numel() for weight in tower.layers.parameters() if weight.ndim == 2)
        matrices = 2 * halves * tower.conv1.weight.numel() + halves * (tower.conv2.weight.numel() + blocks)
        projection = sum(weight.numel() for weight in projector.parameters() if weight.ndim == 2) * (halves // 2)
        attention = 4 * tower.config.d_model * len(tower.layers) * halves**2
        self.encoding, self.projecting = 2 * matrices + attention, 2 * projection
        self.is_trained, self.is_projector_trained = (
            any(weight.requires_grad for weight in part.parameters()) for part in (tower, projector)
        )

    def forward(self, frames: int) -> int:
        """Operations of a forward pass, of audio of any length."""
        del frames
        return self.encoding + self.projecting

    def training(self, frames: int) -> int:
        """Operations of a forward and a backward pass; of an encoder of which parts are frozen, as if none were."""
        del frames
        behind = self.is_projector_trained + self.is_trained  # gradients of its weights, and of what it is given
        return self.encoding * (3 if self.is_trained else 1) + self.projecting * (1 + behind)
