"""What a response is worth: change this function, and the run is yours."""


def reward(sample) -> float:
    """Return 1.0 for the right sum after the last comma, else 0.0.

    ``sample.response_text`` is what the model wrote; ``sample.row`` is the prompt's line of
    prompts.jsonl, with all of its columns. An exception is a failure of the reward, never a zero.
    """
    _, comma, result = sample.response_text.rpartition(",")
    return float(bool(comma) and result.strip() == sample.row["answer"])
