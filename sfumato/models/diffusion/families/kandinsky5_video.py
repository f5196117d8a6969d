"""Kandinsky 5 from text to videos (arXiv 2511.14993), with the latents of an AutoencoderKLHunyuanVideo."""

from __future__ import annotations

from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.models.diffusion.kandinsky_text import LARGEST_GRID, KandinskyText
from sfumato.models.diffusion.latents import PATCH, ScaledVideoLatents
from sfumato.models.diffusion.scratch_autoencoders import build_hunyuan_video_autoencoder


class Kandinsky5Video(ScaledVideoLatents, KandinskyText):
    """Kandinsky 5 Video Lite from text."""

    pipeline_class = "Kandinsky5T2VPipeline"
    frame_rate = 24.0
    build_vae = staticmethod(build_hunyuan_video_autoencoder)
    template_words = (
        "system\nYou are a prompt engineer. Describe the video in detail how camera moves or shakes zoom and view "
        "angle whether it follows objects location of main characters their action dynamism presented actions visual "
        "style is professional footage user generated content some kind animation game scren effects postprocessing "
        "transitions if they attention to order key shown scene describe\nDescribe\nName\nPay\nuser\n{}"
    )

    def check_components(self) -> None:
        if self.denoiser.config.attention_type == "nabla":
            raise ConfigError(
                "model.model_path: a transformer with attention_type nabla chooses blocks of keys from the values of "
                "its queries, which is not trained here: take a model of 5 seconds with full attention, such as "
                "Kandinsky 5 Video Lite 5s"
            )

    @property
    def spatial_patch(self) -> int:
        return PATCH

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width, frames)
        if shape[1] > LARGEST_GRID:
            raise ValueError(f"frames {frames}: there are positions for {LARGEST_GRID} latent frames only")
        return shape

    def network_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The network's input for latents ``[B, C, F, H, W]``: with ``visual_cond`` there are channels for given frames
        and their mask behind those of the latents, and none is given."""
        if not self.denoiser.config.visual_cond:
            return latents
        return nn.functional.pad(latents, (0, 0, 0, 0, 0, 0, 0, latents.shape[1] + 1))

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        factor = self.pipeline.vae_scale_factor_spatial
        scale = self.pipeline._get_scale_factor(latents.shape[3] * factor, latents.shape[4] * factor)
        return self.predict_rows(self.network_inputs(latents, embeddings), sigma, embeddings, scale)
