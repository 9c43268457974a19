#!/usr/bin/python3
"""Follows localnetv1.Endpoints/Next with nothing but code generated from next.proto beside it.

Prints a line of JSON for every state, and one for every call that failed; it then asks again from where it was.
Its generated code (next_pb2.py, next_pb2_grpc.py) is found by PYTHONPATH. Debian: python3-grpcio, protobuf-compiler,
protobuf-compiler-grpc.
"""

import argparse
import json
import sys
import time

import grpc
from google.protobuf.json_format import MessageToDict

import next_pb2
import next_pb2_grpc

PAUSE = 0.1


class Malformed(Exception):
    """The server does not keep to the protocol."""


def say(event, **what):
    print(json.dumps({"event": event, **what}), flush=True)


def plain(message):
    """A message with all its fields, those that are empty included."""
    return MessageToDict(message, including_default_value_fields=True, preserving_proto_field_name=True)


def address(target):
    """As gRPC for Python writes it."""
    if target.startswith("tcp://"):
        return target[len("tcp://") :]
    return target


def state(items):
    """The position and the Services of a whole state."""
    position, services = None, []
    for item in items:
        has_next, has_service = item.HasField("Next"), item.HasField("Endpoints")
        if has_next == has_service:
            raise Malformed(f"an item has one of Next and Endpoints: {item}")
        if has_next != (position is None):
            raise Malformed(f"the first item has Next, and no other: {item}")
        if has_next:
            position = item.Next
        else:
            services.append(item.Endpoints)
    if position is None:
        raise Malformed("the state has no item with Next")
    names = [(service.Namespace, service.Name) for service in services]
    if len(set(names)) != len(names):
        raise Malformed(f"a Service came twice: {names}")
    return position, services


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True, help="unix:///PATH or tcp://HOST:PORT")
    parser.add_argument("--instance-id", type=int, default=0)
    parser.add_argument("--rev", type=int, default=0)
    parser.add_argument("--require", action="append", default=[], choices=["Ready", "Selected", "Local"])
    parser.add_argument("--count", type=int, default=0, help="Number of states after which to exit (0: never)")
    args = parser.parse_args()

    required = None
    if args.require:
        required = next_pb2.EndpointConditions(**{condition: True for condition in args.require})
    options = [
        ("grpc.max_receive_message_length", 16 << 20),
        # How long to wait between attempts; how long one may take stays as it is, for while this program sleeps
        # the attempt does not continue.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
    ]
    instance_id, rev, count = args.instance_id, args.rev, 0
    with grpc.insecure_channel(address(args.target), options=options) as channel:
        stub = next_pb2_grpc.EndpointsStub(channel)
        while True:
            known = next_pb2.NextFilter(InstanceID=instance_id, Rev=rev, RequiredEndpointConditions=required)
            try:
                position, services = state(stub.Next(known))
            except grpc.RpcError as error:
                say("error", code=error.code().name, details=error.details())
                time.sleep(PAUSE)
                continue
            instance_id, rev = position.InstanceID, position.Rev
            say("state", Next=plain(position), Services=[plain(service) for service in services])
            count += 1
            if count == args.count:
                return


if __name__ == "__main__":
    try:
        main()
    except Malformed as error:
        say("malformed", what=str(error))
        sys.exit(1)
