-- The tables of a ledger as version 1 made them in SQLite. Never changed.

CREATE TABLE otel_limits_schema (
    version BIGINT
);

CREATE TABLE otel_limits_invocations (
    id TEXT NOT NULL,
    root_id TEXT NOT NULL,
    parent_id TEXT,
    agent TEXT NOT NULL,
    session_id TEXT,
    trace_id TEXT,
    span_id TEXT,
    source TEXT NOT NULL,
    blind BOOLEAN NOT NULL,
    limits TEXT,
    started_us BIGINT NOT NULL,
    ended_us BIGINT,
    reason TEXT,
    action TEXT,
    breach_limit TEXT,
    breach_cap TEXT,
    breach_observed TEXT,
    turns BIGINT,
    cycles BIGINT,
    tool_calls BIGINT,
    model_calls BIGINT,
    input_tokens BIGINT,
    output_tokens BIGINT,
    cache_read_tokens BIGINT,
    cache_write_tokens BIGINT,
    price_pico BIGINT,
    unpriced_calls BIGINT,
    PRIMARY KEY (id)
);

CREATE INDEX ix_otel_limits_invocations_trace_id ON otel_limits_invocations (trace_id);

CREATE INDEX ix_otel_limits_invocations_root_id ON otel_limits_invocations (root_id);

CREATE INDEX ix_otel_limits_invocations_started_us ON otel_limits_invocations (started_us);

CREATE TABLE otel_limits_model_calls (
    id INTEGER NOT NULL,
    at_us BIGINT NOT NULL,
    day BIGINT GENERATED ALWAYS AS (at_us / 86400000000) STORED,
    duration_us BIGINT,
    trace_id TEXT,
    span_id TEXT,
    invocation_id TEXT NOT NULL,
    number BIGINT,
    root_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    provider TEXT NOT NULL,
    turn BIGINT,
    iteration BIGINT,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cache_read_tokens BIGINT NOT NULL,
    cache_write_tokens BIGINT NOT NULL,
    reported_input_tokens BIGINT,
    reported_output_tokens BIGINT,
    reported_cache_read_tokens BIGINT,
    reported_cache_write_tokens BIGINT,
    reported_total_tokens BIGINT,
    state TEXT NOT NULL,
    estimated BOOLEAN NOT NULL,
    price_pico BIGINT,
    price_source TEXT,
    price_version TEXT,
    source TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (trace_id, span_id),
    UNIQUE (invocation_id, number)
);

CREATE INDEX ix_otel_limits_model_calls_spend ON otel_limits_model_calls (day, agent, model, at_us, input_tokens, output_tokens, cache_read_tokens, price_pico, state);

CREATE TABLE otel_limits_tool_calls (
    id INTEGER NOT NULL,
    at_us BIGINT NOT NULL,
    duration_us BIGINT,
    trace_id TEXT,
    span_id TEXT,
    invocation_id TEXT NOT NULL,
    number BIGINT,
    root_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    tool TEXT NOT NULL,
    status TEXT NOT NULL,
    fingerprint TEXT,
    source TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (trace_id, span_id),
    UNIQUE (invocation_id, number)
);

CREATE TABLE otel_limits_attributes (
    invocation_id TEXT NOT NULL,
    "key" TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (invocation_id, "key")
);

CREATE INDEX ix_otel_limits_attributes_key_value ON otel_limits_attributes ("key", value);

CREATE TABLE otel_limits_quota_changes (
    id TEXT NOT NULL,
    at_us BIGINT NOT NULL,
    quota TEXT NOT NULL,
    share TEXT NOT NULL,
    change TEXT NOT NULL,
    amount TEXT NOT NULL,
    unit TEXT NOT NULL,
    until_us BIGINT,
    changed_by TEXT NOT NULL,
    PRIMARY KEY (id)
);

INSERT INTO otel_limits_schema (version) VALUES (1);
