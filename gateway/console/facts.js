// What an answer cost, in a line: from its last event and the times at which it was asked for and came.
function steps({ tokens_per_step, draft_tokens, accepted_tokens }) {
  const drafts = draft_tokens ? `, ${accepted_tokens} of ${draft_tokens} drafted accepted` : "";
  return `${tokens_per_step.toFixed(1)} tokens a step${drafts}`;
}

function experts({ largest_share, step_experts, step_bytes }) {
  const read = `${step_experts} experts, ${(step_bytes / 2 ** 30).toFixed(1)} GiB a step`;
  return `${read}, ${(100 * largest_share).toFixed(0)} % at most to one`;
}

// `ended` is when it came, `first` its first token, `began` the question, in milliseconds.
export function facts({ usage, receipt }, first, began, ended = performance.now()) {
  const seconds = (ended - first) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [
    `${usage.completion_tokens} tokens`,
    usage.completion_tokens > 1 ? `${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : null,
    `first after ${Math.round(first - began)} ms`,
    receipt?.engine ? steps(receipt.engine) : null,
    receipt?.engine?.experts ? experts(receipt.engine.experts) : null,
    `${cached} of ${usage.prompt_tokens} prompt tokens cached`,
    receipt?.decision?.replica_id ? `served by ${receipt.decision.replica_id}` : null,
  ];
  return parts.filter(Boolean).join(" · ");
}
