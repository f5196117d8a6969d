"""vLLM and SGLang: servers of one kind behind one class."""
