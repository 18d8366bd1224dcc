"""A message with a header of any name: Python's client takes names that are text only, so librdkafka is asked."""

import ctypes

from confluent_kafka import cimpl

_END, _TOPIC, _PARTITION, _VALUE, _COPY_FLAG, _HEADERS = 0, 1, 3, 4, 7, 10
_COPY = 2


def send(brokers: str, topic: str, header: bytes, value: bytes) -> None:
    """Write `value` to partition 0 of `topic`, with one header."""
    kafka = ctypes.CDLL(cimpl.__file__)
    for function in (kafka.rd_kafka_conf_new, kafka.rd_kafka_new, kafka.rd_kafka_headers_new):
        function.restype = ctypes.c_void_p
    pointer, number = ctypes.c_void_p, ctypes.c_int
    settings, reason = pointer(kafka.rd_kafka_conf_new()), ctypes.create_string_buffer(512)
    assert kafka.rd_kafka_conf_set(settings, b"bootstrap.servers", brokers.encode(), reason, 512) == 0
    producer = pointer(kafka.rd_kafka_new(0, settings, reason, ctypes.c_size_t(512)))
    headers = pointer(kafka.rd_kafka_headers_new(ctypes.c_size_t(1)))
    name_bytes = ctypes.c_ssize_t(len(header))
    assert kafka.rd_kafka_header_add(headers, header, name_bytes, b"v", ctypes.c_ssize_t(1)) == 0
    message = [number(_TOPIC), topic.encode(), number(_PARTITION), ctypes.c_int32(0)]
    message += [number(_VALUE), value, ctypes.c_size_t(len(value)), number(_COPY_FLAG), number(_COPY)]
    assert kafka.rd_kafka_producev(producer, *message, number(_HEADERS), headers, number(_END)) == 0
    assert kafka.rd_kafka_flush(producer, 30_000) == 0
    kafka.rd_kafka_destroy(producer)
