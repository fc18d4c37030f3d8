import pytest


@pytest.fixture(scope="session")
def tiny_glm(make_model, tmp_path_factory):
    """A tiny random model whose answers wander: an untied head, and weights large enough to have clear favourites."""
    directory = tmp_path_factory.mktemp("wandering") / "tiny"
    return make_model(
        directory, std=0.3, tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, vocab_size=400
    )
