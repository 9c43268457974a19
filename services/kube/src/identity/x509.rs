//! The validity and the subject of a certificate.
//!
//! Owns: reading the head of an X.509 certificate (RFC 5280, section 4.1). In: PEM. Out: common name, notBefore, notAfter.

use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use yasna::{
    ASN1Error, ASN1ErrorKind, ASN1Result, BERReader, Tag,
    models::ObjectIdentifier,
    tags::{TAG_GENERALIZEDTIME, TAG_PRINTABLESTRING, TAG_UTCTIME},
};

/// Times are Unix seconds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CertificateFacts {
    /// Empty if the subject has none.
    pub(crate) common_name: String,
    pub(crate) not_before: i64,
    pub(crate) not_after: i64,
}

/// The first certificate in `pem`; `None` if no certificate can be read.
pub(crate) fn certificate_facts(pem: &[u8]) -> Option<CertificateFacts> {
    let der = CertificateDer::pem_slice_iter(pem).next()?.ok()?;
    yasna::parse_der(&der, certificate).ok()
}

/// `Certificate ::= SEQUENCE { tbsCertificate, signatureAlgorithm, signatureValue }`.
fn certificate(reader: BERReader<'_, '_>) -> ASN1Result<CertificateFacts> {
    reader.read_sequence(|reader| {
        let facts = reader.next().read_sequence(|reader| {
            // version, if it is not 1; serialNumber, signature, issuer
            reader.read_optional(|reader| reader.read_tagged(Tag::context(0), |reader| reader.read_der()))?;
            for _ in 0..3 {
                reader.next().read_der()?;
            }
            let (not_before, not_after) =
                reader.next().read_sequence(|reader| Ok((time(reader.next())?, time(reader.next())?)))?;
            let common_name = common_name(reader.next())?;
            // subjectPublicKeyInfo and what may follow
            reader.next().read_der()?;
            while reader.read_optional(|reader| reader.read_der())?.is_some() {}
            Ok(CertificateFacts { common_name, not_before, not_after })
        })?;
        reader.next().read_der()?;
        reader.next().read_der()?;
        Ok(facts)
    })
}

/// `Time ::= CHOICE { utcTime, generalTime }`.
fn time(reader: BERReader<'_, '_>) -> ASN1Result<i64> {
    match reader.lookahead_tag()? {
        TAG_UTCTIME => Ok(reader.read_utctime()?.datetime().unix_timestamp()),
        TAG_GENERALIZEDTIME => Ok(reader.read_generalized_time()?.datetime().unix_timestamp()),
        _ => Err(ASN1Error::new(ASN1ErrorKind::Invalid)),
    }
}

/// The last common name (2.5.4.3) of `Name ::= SEQUENCE OF SET OF SEQUENCE { type, value }`.
fn common_name(reader: BERReader<'_, '_>) -> ASN1Result<String> {
    let kind = ObjectIdentifier::from_slice(&[2, 5, 4, 3]);
    let mut name = String::new();
    reader.read_sequence_of(|reader| {
        reader.read_set_of(|reader| {
            reader.read_sequence(|reader| {
                if reader.next().read_oid()? != kind {
                    return reader.next().read_der().map(drop);
                }
                let value = reader.next();
                name = match value.lookahead_tag()? {
                    TAG_PRINTABLESTRING => value.read_printable_string()?,
                    _ => value.read_utf8string()?,
                };
                Ok(())
            })
        })
    })?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair, date_time_ymd};

    use super::*;

    fn pem(params: &CertificateParams) -> String {
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
    }

    #[test]
    fn e4_a_certificate_states_its_user_and_its_end() {
        for (end, seconds) in
            [((2030, 1, 2), 1_893_542_400), ((2050, 1, 1), 2_524_608_000), ((9999, 12, 31), 253_402_214_400)]
        {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
            params.distinguished_name.push(DnType::CommonName, "system:node:a");
            params.not_before = date_time_ymd(2026, 1, 1);
            params.not_after = date_time_ymd(end.0, end.1, end.2);
            let expected = CertificateFacts {
                common_name: "system:node:a".into(),
                not_before: 1_767_225_600,
                not_after: seconds,
            };
            let pem = pem(&params);
            assert_eq!(certificate_facts(pem.as_bytes()), Some(expected));
            // The kubelet's file contains the key as well.
            let key = KeyPair::generate().unwrap().serialize_pem();
            assert_eq!(certificate_facts(format!("{key}{pem}").as_bytes()).unwrap().not_after, seconds);
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let printable = DnValue::PrintableString("system:node:b".try_into().unwrap());
        params.distinguished_name.push(DnType::CommonName, printable);
        assert_eq!(certificate_facts(pem(&params).as_bytes()).unwrap().common_name, "system:node:b");
    }

    #[test]
    fn e4_invalid_certificates_yield_no_facts() {
        let full = pem(&CertificateParams::default());
        let block = |text: &str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
        for text in
            ["", "hush", &full[..full.len() / 2], &block("aHVzaA=="), &block("MAA="), &block("MAIwAA==")]
        {
            assert_eq!(certificate_facts(text.as_bytes()), None, "{text}");
        }
    }
}
