{{- define "keelson.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "keelson.port" -}}
{{ splitList ":" . | last }}
{{- end -}}


{{/* Whether an address is one of loopback, or off. */}}
{{- define "keelson.isLocal" -}}
{{- if or (eq . "") (hasPrefix "127." .) (hasPrefix "[::1]" .) (hasPrefix "localhost" .) -}}true{{- end -}}
{{- end -}}
{{- /* Whether the proxy gets the rights of the backend ebpf. */ -}}
{{- define "keelson.mayUseEbpf" -}}
{{- if or (eq .Values.proxy.backend "ebpf") .Values.proxy.ebpf.allowed }}yes{{ end -}}
{{- end }}
