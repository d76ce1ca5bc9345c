"""Furlong's own drawing of tokens inside an SGLang server: the same code as in the embedded engine.

A request's `sampling_seed` and `custom_params: {"prompt": tokens of the prompt proper}` name the random numbers: the one
for reply position t is a function of (seed, t), whatever else is decoded, and whether the reply was resumed or not. For each
token it returns `meta_info["sampled"]`: its log-probability under the distribution it was drawn from, and under the
unmodified model; null where the model's logits are not finite.
"""

import math

import numpy as np
import torch


def make(sampler_module):
    """What takes the place of SGLang's `create_sampler`.

    Args:
        sampler_module: `sglang.srt.layers.sampler`.
    """
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    SamplingBatchInfo.adjusted_from_schedule_batch = _keep_seeds

    class FurlongSampler(sampler_module.Sampler):
        def forward(
            self,
            logits_output,
            sampling_info,
            return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            positions,
            **kwargs,
        ):
            tokens, sampled = _draw(logits_output.next_token_logits, sampling_info, positions)
            logits_output.customized_info = {"sampled": sampled}
            return tokens.to(sampling_info.temperatures.device)

    return lambda backend=None: FurlongSampler()


def _keep_seeds(info, batch, vocab_size):
    """Three numbers per request, in the one field that SGLang sorts and merges with the batch and does not use itself."""
    asked = [(request.sampling_params, request.sampling_params.custom_params or {}) for request in batch.reqs]
    rows = [(params.sampling_seed or 0, own.get("prompt", 1), int(own.get("greedy", False))) for params, own in asked]
    info.sampling_seed = torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(info.device)


def _draw(logits, info, positions):
    """Returns token ids, int32 [rows], and per row the two log-probabilities."""
    from furlong.ops.policy.sampling import Rules, draw, uniforms

    seeds, prompts, greedy = info.sampling_seed.cpu().numpy().T
    # `positions` are those of the last token fed: the prompt's last one before reply position 0.
    numbers = uniforms(seeds.astype(np.uint64), positions.cpu().numpy() - prompts + 1)
    # SGLang itself has turned temperature 0 into 1 with the one most likely token, and no top-k into a large number.
    temperatures, top_k = info.temperatures.cpu().numpy().flatten(), info.top_ks.cpu().numpy()
    rules = Rules(
        temperatures=np.where(greedy, np.float32(0), temperatures),
        top_k=np.where(top_k < logits.shape[1], top_k, 0),
        top_p=info.top_ps.cpu().numpy(),
        min_p=info.min_ps.cpu().numpy(),
    )
    drawn = draw(logits.cpu(), rules, torch.from_numpy(numbers))
    pairs = zip(drawn.logprobs.tolist(), drawn.model_logprobs.tolist(), strict=True)
    return drawn.tokens.to(torch.int32), [list(pair) if all(map(math.isfinite, pair)) else None for pair in pairs]
