"""Certificates for development: two CAs that sign once and are forgotten, and what they signed.

    public-ca.pem                      clients trust it
    router.pem, router-key.pem         the router's, for the names by which clients call it
    cluster-ca.pem                     nodes trust it, and only each other's certificates have it
    cluster.pem, cluster-key.pem       one for all processes of the cluster, router included

No CA's key is kept: nobody can sign more, and for another name all are made anew.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MEMBER = "pdserve-cluster"  # as pdserve/rpc/tls.py expects it
CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PemFile:
    """``is_secret``: for its owner's eyes."""

    name: str
    content: bytes
    is_secret: bool


@dataclass(frozen=True, slots=True)
class _Signer:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def development_files(
    hosts: Sequence[str], *, days: int, now: datetime.datetime
) -> tuple[PemFile, ...]:
    """All files. ``hosts``: more names or addresses of the router."""
    public_ca = _authority("pdserve public CA", now, days)
    names = tuple(dict.fromkeys((*LOCAL_NAMES, *hosts)))
    router = _signed(
        public_ca, "pdserve router", names, now, days, [ExtendedKeyUsageOID.SERVER_AUTH]
    )
    cluster_ca = _authority("pdserve cluster CA", now, days)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    member = _signed(cluster_ca, MEMBER, (MEMBER,), now, days, both)
    return (
        _pem("public-ca.pem", public_ca),
        _pem("router.pem", router),
        _key_pem("router-key.pem", router),
        _pem("cluster-ca.pem", cluster_ca),
        _pem("cluster.pem", member),
        _key_pem("cluster-key.pem", member),
    )


def _authority(name: str, now: datetime.datetime, days: int) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), now, days)
    usage = _usage(signs_certificates=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return _Signer(builder.sign(key, hashes.SHA256()), key)


def _signed(
    authority: _Signer,
    name: str,
    hosts: Sequence[str],
    now: datetime.datetime,
    days: int,
    purposes: Sequence[x509.ObjectIdentifier],
) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject
    builder = _builder(_name(name), issuer, key.public_key(), now, days)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False),
        (issuer_key, False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return _Signer(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(name: str, signer: _Signer) -> PemFile:
    content = signer.certificate.public_bytes(serialization.Encoding.PEM)
    return PemFile(name=name, content=content, is_secret=False)


def _key_pem(name: str, signer: _Signer) -> PemFile:
    content = signer.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return PemFile(name=name, content=content, is_secret=True)
