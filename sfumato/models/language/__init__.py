"""Language models: any causal model of transformers, packed documents, the probe, exports."""
