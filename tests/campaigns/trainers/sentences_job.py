"""Train an embedding model by sentence-transformers, or a classifier on one by SetFit, as docs/trainers.md does."""

import torch
from job import OPTIONS, SAVED, TEXTS, record, write_answer
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel


def main() -> None:
    """Train, and load what was saved by the tool itself."""
    record()
    names = {}
    exec(OPTIONS["code"], names)
    model = names["model"]
    if isinstance(model, SetFitModel):
        loaded, body = SetFitModel.from_pretrained(SAVED, trust_remote_code=True), model.model_body
        is_same = torch.equal(*(each.predict_proba(TEXTS, as_numpy=False) for each in (model, loaded)))
    else:
        loaded, body = SentenceTransformer(SAVED, trust_remote_code=True), model
        is_same = torch.equal(*(each.encode(TEXTS, convert_to_tensor=True) for each in (model, loaded)))
    write_answer(["sentence-transformers", "setfit"], model=body[0].auto_model, auto="AutoModel", loaded=is_same)


if __name__ == "__main__":
    main()
