"""The parts of the in-memory S3 server; `ckptstore.testing.s3_server` is its front door.

objects      stored objects, multipart uploads, the log of requests
checksums    digests that a request carries, checked against its body
rules        faults on purpose
certificates of the server, for TLS, and of the authority that its clients trust
listing      the XML of listings
messages     a request whose body has arrived, and an answer
uploads      multipart uploads
service      one S3 request in, one answer out: no sockets, no waiting
shared       the state that all connections of a server share
control      faults, counts and the log over HTTP
incoming     a request while its body comes in
connection   HTTP/1.1 on a socket: bodies go straight into an object's memory and out of it again
"""
