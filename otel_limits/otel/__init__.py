"""OpenTelemetry: spans to follow, providers to attach to, exports to set up.

In: spans of any instrumentation, and the settings of OTLP.
Out: calls of `runs` for each span, and exports over OTLP.
May touch: the tracer, meter and logger providers of the process, with `opentelemetry.sdk`.
"""
