"""Operations of encoders of audio, by the number of frames of a spectrogram."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder


def sound_flops(tower: nn.Module, beside: dict[str, nn.Module]) -> SoundFlops | PlaneSoundFlops | WholeSoundFlops:
    """Chooses the count for an encoder of audio by its submodules.

    Args:
        tower: the encoder.
        beside: the other submodules outside of the language model; a projector that is counted here is removed from it.
    """
    if not hasattr(tower, "conv1"):
        return PlaneSoundFlops(cast("Qwen3OmniMoeAudioEncoder", tower))
    if hasattr(tower, "proj"):
        return SoundFlops(cast("Qwen2_5OmniAudioEncoder", tower))
    return WholeSoundFlops(cast("Qwen2AudioEncoder", tower), beside.pop("multi_modal_projector"))


class SoundFlops:
    """Operations of the encoder of audio of omni models.

    It has two convolutions, the second of which halves the number of frames; blocks with attention within windows of
    frames; and a projection of each pair of frames. Padding of the last window is not counted.
    """

    def __init__(self, tower: Qwen2_5OmniAudioEncoder) -> None:
        """``tower`` is the encoder."""
        self.first = tower.conv1.weight.numel()  # pyright: ignore[reportCallIssue]  (stubs of a convolution lose its kind)
        self.second = tower.conv2.weight.numel()
        self.projection = tower.proj.weight.numel()
        self.blocks = sum(weight.numel() for weight in tower.layers.parameters() if weight.ndim == 2)
        self.attention = 4 * tower.config.d_model * len(tower.layers)
        self.window = 2 * tower.config.n_window
        self.is_trained = any(weight.requires_grad for weight in tower.parameters())

    def forward(self, frames: int) -> int:
        """Operations of a forward pass over a number of frames."""
        sizes = [self.window] * (frames // self.window) + [frames % self.window] * (frames % self.window > 0)
        halves = [(size + 1) // 2 for size in sizes]
        matrices = self.first * frames + (self.second + self.blocks) * sum(halves)
        pairs = sum(half**2 for half in halves)
        return 2 * (matrices + self.projection * (sum(halves) // 2)) + self.attention * pairs

    def training(self, frames: int) -> int:
        """Operations of a forward and a backward pass; of a partly frozen encoder as if nothing were frozen."""
        return self.forward(frames) * (3 if self.is_trained else 1)


class PlaneSoundFlops:
    """Operations of the encoder of audio of Qwen3-Omni.

    Three convolutions halve the frames and the frequency bands of each chunk of a second. Attention is within windows
    of several chunks.
    """

    def __init__(self, tower: Qwen3OmniMoeAudioEncoder) -> None:
        """``tower`` is the encoder."""
        self.convolutions = [layer.weight.numel() for layer in (tower.conv2d1, tower.conv2d2, tower.conv2d3)]  # pyright: ignore[reportCallIssue]
        self.bands = tower.num_mel_bins
        self.chunk = 2 * tower.n_window
        matrices = [tower.conv_out.weight, tower.proj1.weight, tower.proj2.weight, *tower.layers.parameters()]
        self.of_token = sum(weight.numel() for weight in matrices if weight.ndim == 2)
        self.attention = 4 * tower.config.d_model * len(tower.layers)
        self.chunks_of_window = tower.n_window_infer // self.chunk
        self.is_trained = any(weight.requires_grad for weight in tower.parameters())

    def forward(self, frames: int) -> int:
        """Operations of a forward pass over a number of frames."""
        sizes = [self.chunk] * (frames // self.chunk) + [frames % self.chunk] * (frames % self.chunk > 0)
        total = 0
        tokens = []  # of each chunk
        for size in sizes:
            bands = self.bands
            for weights in self.convolutions:
                size = (size + 1) // 2
                bands = (bands + 1) // 2
                total += weights * size * bands
            tokens.append(size)
        total += self.of_token * sum(tokens)
        windows = [
            tokens[start : start + self.chunks_of_window] for start in range(0, len(tokens), self.chunks_of_window)
        ]
        return 2 * total + self.attention * sum(sum(window) ** 2 for window in windows)

    def training(self, frames: int) -> int:
        """As ``SoundFlops``."""
        return self.forward(frames) * (3 if self.is_trained else 1)


class WholeSoundFlops:
    """Operations of the encoder of audio of Qwen2-Audio, which pads every spectrogram to the greatest length.

    The padding is computed as well, so the number of frames does not matter.
    """

    def __init__(self, tower: Qwen2AudioEncoder, projector: nn.Module) -> None:
        """``tower`` is the encoder, ``projector`` what brings its output into the language model."""
        halves = tower.config.max_source_positions
        blocks = sum(weight.numel() for weight in tower.layers.parameters() if weight.ndim == 2)
        matrices = 2 * halves * tower.conv1.weight.numel() + halves * (tower.conv2.weight.numel() + blocks)
        projection = sum(weight.numel() for weight in projector.parameters() if weight.ndim == 2) * (halves // 2)
        attention = 4 * tower.config.d_model * len(tower.layers) * halves**2
        self.encoding = 2 * matrices + attention
        self.projecting = 2 * projection
        self.is_trained, self.is_projector_trained = (
            any(weight.requires_grad for weight in part.parameters()) for part in (tower, projector)
        )

    def forward(self, frames: int) -> int:
        """Operations of a forward pass over audio of any length."""
        del frames
        return self.encoding + self.projecting

    def training(self, frames: int) -> int:
        """Operations of a forward and a backward pass; of a partly frozen encoder as if nothing were frozen."""
        del frames
        # The projector's backward pass: gradients of its weights, and of its input if the encoder is trained.
        backward_products = self.is_projector_trained + self.is_trained
        return self.encoding * (3 if self.is_trained else 1) + self.projecting * (1 + backward_products)
