"""The formats of prompts for language models, chosen by ``data.data_type``; a format's fields are its parameters."""
