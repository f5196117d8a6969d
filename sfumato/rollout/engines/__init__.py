"""Engines that generate text: the embedded one, vLLM and SGLang, behind the protocol of ``engines/base.py``."""
