"""What the lake can be asked in SQL beside its tables: views that join them along the line from token to weights.

The newest attempt of a step is found through the weights version that it made, so rows of superseded attempts appear in
no view but `waste`. A version in which the draft alone is another has no step of its own; its parent has.
"""

from __future__ import annotations

PARENTS = "SELECT run, version, parent FROM weight_versions"
"""What `version_parents` is: kept in memory, as walks read it again for every generation."""

VIEWS: dict[str, tuple[str, str]] = {
    "version_ancestors": (
        "A weights version and every version that it is built on, itself at depth 0, the base model's at the greatest. All "
        "pairs of a long run are many: for one version of thousands, `furlong lineage` is quicker.",
        """
        WITH RECURSIVE walk(run, version, ancestor, depth) AS (
            SELECT run, version, version, 0 FROM version_parents
            UNION ALL
            SELECT walk.run, walk.version, above.parent, walk.depth + 1
            FROM walk JOIN version_parents AS above ON above.run = walk.run AND above.version = walk.ancestor
            WHERE above.parent IS NOT NULL
        )
        SELECT * FROM walk
        """,
    ),
    "version_steps": (
        "A weights version and the steps whose gradients are in it: those that made it or one of its ancestors.",
        """
        SELECT walk.run, walk.version, walk.depth, steps.step, steps.attempt, steps.version_after AS made
        FROM version_ancestors AS walk
        JOIN steps ON steps.run = walk.run AND steps.version_after = walk.ancestor
        """,
    ),
    "outcomes": (
        "What a step did with a trajectory: its reward, advantage and disposition, and the tokens that entered the loss.",
        """
        SELECT run, step, attempt, version_after AS made, unnest(outcomes, recursive := true) FROM steps
        """,
    ),
    "batch_groups": (
        "The groups that a step took, and the step that they were drawn for.",
        """
        SELECT run, step, attempt, taken.group_id AS group_id, taken.step AS drawn_for
        FROM (SELECT run, step, attempt, unnest(groups) AS taken FROM batches)
        """,
    ),
    "token_origins": (
        "Every sampled token: where it stands, its log-probability, the weights version that sampled it, and whether the "
        "draft had proposed it.",
        """
        SELECT run, trajectory_id, prompt_id, seed, place - 1 AS position, tokens[place] AS token,
            logprobs[place] AS logprob, model_logprobs[place] AS model_logprob, drafted[place] AS drafted,
            list_filter(version_spans, lambda s: s.start <= place - 1 AND place - 1 < s."end")[1].version AS version
        FROM (SELECT *, unnest(range(1, len(tokens) + 1)) AS place FROM trajectories)
        WHERE loss_mask[place]
        """,
    ),
    "token_mismatch": (
        "The trainer's and the engine's log-probability of every trained token, under the weights that sampled it.",
        """
        SELECT run, step, attempt, trajectory_id, place - 1 AS position, engine[place] AS engine, trainer[place] AS trainer,
            trainer[place] - engine[place] AS difference
        FROM (
            SELECT scores.run, scores.step, scores.attempt, trajectory_id, scores.logprobs AS trainer,
                trajectories.logprobs AS engine, unnest(range(1, len(scores.logprobs) + 1)) AS place
            FROM trainer_scores AS scores JOIN trajectories USING (run, trajectory_id)
        )
        WHERE trainer[place] IS NOT NULL
        """,
    ),
    "prompt_exposure": (
        "Every time that a prompt was drawn: the step that took its group, if one did, and the first version with its "
        "gradient, if it had one.",
        """
        SELECT groups.run, groups.dataset, groups.prompt_id, groups.group_id, groups.weights_version AS drawn_at,
            taken.step, taken.attempt, seen.made AS first_version, coalesce(seen.trajectories, 0) AS trained_trajectories,
            coalesce(seen.tokens, 0) AS trained_tokens
        FROM groups
        LEFT JOIN batch_groups AS taken ON taken.run = groups.run AND taken.group_id = groups.group_id
        LEFT JOIN (
            SELECT run, group_id, step, attempt, made, count(*) AS trajectories, sum(tokens_trained)::BIGINT AS tokens
            FROM outcomes WHERE tokens_trained > 0 GROUP BY ALL
        ) AS seen ON seen.run = groups.run AND seen.group_id = groups.group_id
            AND seen.step = taken.step AND seen.attempt = taken.attempt
        """,
    ),
    "group_states": (
        "Where each group stands: its newest event of the ledger.",
        """
        SELECT run, group_id, arg_max(state, seq) AS state, arg_max(reason, seq) AS reason, arg_max(step, seq) AS step
        FROM ledger GROUP BY run, group_id
        """,
    ),
    "waste": (
        "Sampled tokens and seconds by what became of them: a disposition, the reason a group was rejected for, `waiting`, "
        "or the kind of a failed try.",
        """
        SELECT run, fate, count(*) AS trajectories, sum(tokens)::BIGINT AS tokens, sum(seconds) AS seconds FROM (
            SELECT drawn.run, len(list_filter(loss_mask, lambda m: m)) AS tokens, seconds,
                CASE WHEN states.state = 'rejected' THEN states.reason
                     WHEN outcomes.disposition IS NOT NULL THEN outcomes.disposition ELSE 'waiting' END AS fate
            FROM trajectories AS drawn
            JOIN group_states AS states ON states.run = drawn.run AND states.group_id = drawn.group_id
            LEFT JOIN outcomes ON outcomes.run = drawn.run AND outcomes.trajectory_id = drawn.trajectory_id
            UNION ALL
            SELECT run, tokens, NULL, 'failed: ' || kind FROM failures
        )
        GROUP BY run, fate
        """,
    ),
}
"""Name -> (what a row is, SQL). Later ones may use earlier ones."""
