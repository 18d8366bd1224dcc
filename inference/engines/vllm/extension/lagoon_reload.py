"""What Lagoon adds to vLLM's workers: a reload that also reaches tied output embeddings.

Imported by the server's interpreter, so it needs nothing but that interpreter's vLLM; the engine puts this folder, and
nothing else of Lagoon, on its PYTHONPATH. Given servers: `--worker-extension-cls lagoon_reload.Reload`.
"""

from typing import Any


class Reload:
    """Mixed into every vLLM worker."""

    model_runner: Any

    def lagoon_reload(self, folder: str) -> None:
        """Load the weights of the Hugging Face folder `folder` in place."""
        self.model_runner.reload_weights(weights_path=folder)
        model = self.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
            # a CPU's linear layers are packed; a tied head is not repacked by the reload and would serve old weights
            head.quant_method.process_weights_after_loading(head)
