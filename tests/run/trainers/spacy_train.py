"""`spacy train` of a text classifier: `model-last/` is overwritten by each save, `model-best/` is a copy of it.

A start goes on from `model-last`, which its configuration names as the source of the classifier. spaCy keeps neither
optimizer nor step nor the order of the data: so the optimizer is one without a state, the text of a step follows from
its number, and `before_to_disk` puts the number into `meta.json`. What is told is not the loss, which spaCy sums up
from save to save, but a prediction before each step, which depends on all steps before. Each start saves after its
first step and then after every second one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import spacy
from progress import LAST_STEP, Progress, arguments
from spacy.cli.train import train
from spacy.language import Language
from spacy.training import Example
from thinc.api import Config

TEXTS = [" ".join(f"w{start * number % 23}" for number in range(1, 8)) for start in range(LAST_STEP)]
SMALL = {"no_output_layer": False, "length": 1024}
NEW = {
    "factory": "textcat",
    "model": {"@architectures": "spacy.TextCatBOW.v3", "exclusive_classes": True, "ngram_size": 1, **SMALL},
}


def main() -> None:
    given = arguments()
    progress, last = Progress(given.losses, given.pause_at), given.folder / "model-last"
    done = json.loads((last / "meta.json").read_text())["done"] if last.exists() else 0
    steps = iter(range(done + 1, LAST_STEP + 1))
    step = done

    def texts(nlp: Language) -> Iterator[Example]:
        for number in range(done, LAST_STEP):
            yield Example.from_dict(nlp.make_doc(TEXTS[number]), {"cats": {"even": number % 2 == 0, "odd": number % 2}})

    def tell(nlp: Language, _info: dict[str, Any]) -> None:
        nonlocal step
        step = next(steps)
        time.sleep(given.step_seconds)
        progress.told(step, nlp(" ".join(TEXTS)).cats["even"])

    def note(nlp: Language) -> Language:
        nlp.meta["done"] = step
        return nlp

    spacy.registry.readers("texts", func=lambda: texts)
    spacy.registry.callbacks("tell", func=lambda: tell)
    spacy.registry.callbacks("note", func=lambda: note)
    config = {
        "nlp": {"lang": "en", "pipeline": ["textcat"]},
        "components": {"textcat": {"source": str(last)} if done else NEW},
        "corpora": {"train": {"@readers": "texts"}, "dev": {"@readers": "texts"}},
        "training": {
            "seed": 0,
            "gpu_allocator": None,
            "max_epochs": -1,
            "max_steps": LAST_STEP - done - 1,
            "eval_frequency": 2,
            "batcher": {"@batchers": "spacy.batch_by_sequence.v1", "size": 1},
            "optimizer": {"@optimizers": "SGD.v1", "learn_rate": 0.5, "use_averages": False},
            "before_update": {"@callbacks": "tell"},
            "before_to_disk": {"@callbacks": "note"},
        },
    }
    path = given.losses.with_suffix(".cfg")
    Config(config).to_disk(path)
    train(path, given.folder)


if __name__ == "__main__":
    main()
